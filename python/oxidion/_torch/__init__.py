"""The torch that is there: the library between it and the core, and what differs among its versions."""
