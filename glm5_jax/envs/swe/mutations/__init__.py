"""Makes bugs in sources by small edits, at syntax trees in Python and at tokens in eight other languages."""
