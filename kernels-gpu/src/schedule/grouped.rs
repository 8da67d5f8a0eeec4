//! grouped
