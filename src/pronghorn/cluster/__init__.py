"""Actors on other machines: environments and acting there, learning here, Ray between them."""
