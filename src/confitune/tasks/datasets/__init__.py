"""One file for each dataset: where its files lie, what their labels are, which of them train and which test."""
