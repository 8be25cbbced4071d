"""Running detectors on pictures and writing them in formats for other programs."""
