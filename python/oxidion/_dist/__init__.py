"""Meshes, process groups and collectives: the only users of ``torch.distributed``."""
