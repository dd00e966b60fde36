"""The persistent work list on Hopper: a working prototype of the structure that comes after clusters. See README.md."""
