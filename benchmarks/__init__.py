"""Correctness and speed on a real GPU. Run the scripts as modules from the repository root; see README.md."""
