"""Install the runtime in the scheduler: placement, owners of outputs, recovery and reports."""
