"""What a hook is: data. No weight is touched here."""
