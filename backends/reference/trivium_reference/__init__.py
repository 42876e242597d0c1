"""The numpy references of the operator set as a backend, without privilege: what every other one is judged by."""
