"""One file per figure. A plot reads finished results; it never computes an estimate or trains a network."""
