//! column_sums
