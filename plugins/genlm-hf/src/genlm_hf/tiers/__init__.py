"""The ways to serve a model, fastest first, and the choice between them."""
