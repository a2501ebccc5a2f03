"""What runs inside an environment worker: standard library, NumPy and the environment only. Python 3.8 syntax."""
