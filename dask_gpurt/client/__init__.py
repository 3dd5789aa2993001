"""What happens in the process of a user: switching on, lowering and planning queries, reading reports."""
