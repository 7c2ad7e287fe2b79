"""Plans of meshes that are not there: their memory, communication and work."""
