"""What a person calls: command line, notebook, lab, site, progress."""
