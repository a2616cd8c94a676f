"""A test set made to hurt: what the hidden one may hold and the visible one does not show."""
