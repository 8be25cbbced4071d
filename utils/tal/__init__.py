"""Old import path of the label assignment for users' scripts."""
