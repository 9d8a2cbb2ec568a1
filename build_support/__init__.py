"""Build-time code of pyspec; never installed, and imports nothing of pyspec."""
