"""The database's tables, one file for each subject."""
