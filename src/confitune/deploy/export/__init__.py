"""Tasks of a network or a bundle as files for other runtimes: one module a format."""
