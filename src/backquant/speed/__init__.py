"""What pays: kernels beside float operators, whole models beside each other, timed here."""
