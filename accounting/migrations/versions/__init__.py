"""One module a revision, named by its number. A published revision never changes."""
