"""Networks: encoders, recurrent cores and the actor-critic that joins them. They know no process and no config."""
