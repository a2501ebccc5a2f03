"""The trainer-side of environments: the recv/send contract, worker processes, native vector environments."""
