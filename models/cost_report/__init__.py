"""What the cost model says about the claims of docs/cost_model.md."""
