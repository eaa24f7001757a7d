"""What of a network a task may own, one file each."""
