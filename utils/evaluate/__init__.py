"""Validation: matching, figures, confusion matrix, COCO json, plots and the loop that drives them."""
