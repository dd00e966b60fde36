"""Working prototypes with their measurements: not built, not in the menu, not in the wheel."""
