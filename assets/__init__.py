"""The tiny model (see README.md here) and where its files are."""
