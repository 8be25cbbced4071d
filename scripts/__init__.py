"""Command-line helpers around the repository; the package mark keeps the name from being taken by others."""
