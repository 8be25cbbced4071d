"""Data sets: description, scan, decoding, augmentation, loaders, and sources for detection."""
