"""A net becomes a bundle, a predictor, a file for another runtime, a server."""
