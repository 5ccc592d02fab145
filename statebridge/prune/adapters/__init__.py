"""Adapters: one file a backbone. Nothing is imported here, so that none needs another's library."""
