"""From images to breasts, and from several tables of the same breasts to one."""
