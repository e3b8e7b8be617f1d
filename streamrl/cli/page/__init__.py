"""`report.html`: the page of a run, one file that loads nothing from elsewhere."""
