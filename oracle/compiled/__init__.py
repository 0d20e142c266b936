"""What compilers made of the kernels: resource records, and proofs from PTX and SASS."""
