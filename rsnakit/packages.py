"""What requirements.txt asks for and is not installed, and installing just that; torch is never touched."""
