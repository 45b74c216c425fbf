"""`gemray bench`: what a step costs, beside the least it could cost. Nothing here imports Ray."""
