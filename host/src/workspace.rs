//! Layout of an operation's scratch memory: named regions of one device allocation.

use std::fmt;

use crate::Error;
use crate::gpu::{Buffer, Gpu};

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

/// Scratch memory of an operation on a GPU: serves one run at a time, and runs that follow each other on one stream.
#[derive(Debug)]
pub struct Workspace {
    address: u64,
    bytes: u64,
    device: usize,
    /// `None` if the memory is somebody else's.
    _memory: Option<Buffer<u8>>,
}

impl Workspace {
    /// Allocates a workspace of `bytes` bytes, such as a plan's [`WorkspaceLayout::bytes`].
    ///
    /// # Errors
    /// [`Error::Gpu`]: out of memory.
    pub fn allocate(gpu: &Gpu, bytes: u64) -> Result<Workspace, Error> {
        let memory = Buffer::uninit(gpu, "the workspace", bytes as usize)?;
        Ok(Workspace { address: memory.address(), bytes, device: gpu.index(), _memory: Some(memory) })
    }

    /// A workspace in memory of somebody else, such as a caching allocator of PyTorch.
    ///
    /// # Safety
    /// `address` is a device address on GPU `device` with `bytes` bytes behind it that nothing else uses while work that was given this
    /// workspace runs.
    pub unsafe fn foreign(address: u64, bytes: u64, device: usize) -> Workspace {
        Workspace { address, bytes, device, _memory: None }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it is on `gpu`, aligned, and large enough for `layout`.
    pub(crate) fn check(&self, gpu: &Gpu, layout: &WorkspaceLayout) -> Result<(), Error> {
        let rule = "a workspace is on the plan's GPU, starts on a 256-byte boundary and has at least the plan's workspace bytes";
        if self.device != gpu.index() || !self.address.is_multiple_of(ALIGN) || self.bytes < layout.bytes() {
            let (found, needed) = (self.bytes, layout.bytes());
            let found = format!("{found} bytes at {:#x} on GPU {}, {needed} needed", self.address, self.device);
            return Err(Error::Layout { tensor: "workspace".into(), found, rule });
        }
        Ok(())
    }

    /// Device address of a region.
    pub(crate) fn at(&self, region: Region) -> u64 {
        self.address + region.offset
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
