"""Federated training that is private for every client."""
