"""Language models as files and tables."""
