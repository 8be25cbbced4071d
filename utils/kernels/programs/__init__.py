"""The Triton programs themselves: importing one of these modules imports Triton."""
