//! Layout of an operation's scratch memory: named regions of one device allocation.

use std::fmt;

/// Alignment of every region in bytes: what TMA and 16-byte accesses need, with room to spare.
const ALIGN: u64 = 256;

/// A region of a workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Byte offset from the start of the workspace, a multiple of 256.
    pub offset: u64,
    /// Size in bytes, as asked for.
    pub bytes: u64,
}

/// Regions of a workspace, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkspaceLayout {
    regions: Vec<(&'static str, Region)>,
    bytes: u64,
}

impl WorkspaceLayout {
    /// Appends a region of `bytes` bytes (0 is fine) and returns where it is.
    pub fn add(&mut self, name: &'static str, bytes: u64) -> Region {
        let region = Region { offset: self.bytes, bytes };
        self.bytes = (self.bytes + bytes).next_multiple_of(ALIGN);
        self.regions.push((name, region));
        region
    }

    /// Size of the whole workspace in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Name and place of every region.
    pub fn regions(&self) -> &[(&'static str, Region)] {
        &self.regions
    }
}

/// `bytes` with a binary unit.
pub(crate) fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

impl fmt::Display for WorkspaceLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "workspace {}", human_bytes(self.bytes))?;
        for (name, region) in self.regions.iter().filter(|(_, region)| region.bytes > 0) {
            write!(f, "\n  {name:<24} {:>12}", human_bytes(region.bytes))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_aligned_disjoint_and_inside() {
        let mut layout = WorkspaceLayout::default();
        let regions = [1, 0, 256, 300].map(|bytes| layout.add("x", bytes));
        for pair in regions.windows(2) {
            assert!(pair[0].offset + pair[0].bytes <= pair[1].offset);
        }
        assert!(regions.iter().all(|r| r.offset % ALIGN == 0 && r.offset + r.bytes <= layout.bytes()));
        assert_eq!(layout.bytes(), 256 + 256 + 512);
    }
}
