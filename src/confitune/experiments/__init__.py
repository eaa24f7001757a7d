"""Recipe -> runs -> summary and pictures: `runs`, `reporting`, and `paper` to reproduce the paper."""
