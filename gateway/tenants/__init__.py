"""Owners and their keys: authentication, access, rates, budgets and usage."""
