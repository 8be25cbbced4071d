"""What one training run needs: label assignment, loss, optimizer, schedules, averaging, the trainer."""
