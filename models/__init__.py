"""Networks of the YOLOv9 family: blocks, heads, the model graph, its inference form and its files."""
