"""The whole way: its stations and their commands, what they cost, and the report on them."""
