//! The architectures that PTX is made for.

use std::fmt;

/// Target of a PTX module. Each takes the lowest PTX version that LLVM offers for it, so that older drivers load the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// Compute 8.0 and everything later, by JIT. PTX 7.0: CUDA 11.0 and later.
    Sm80,
    /// Compute 9.0 alone, with its own instructions (wgmma, setmaxnreg). PTX 8.0: CUDA 12.0 and later.
    Sm90a,
}

impl Arch {
    /// All of them.
    pub const ALL: [Arch; 2] = [Arch::Sm80, Arch::Sm90a];

    /// Name for rustc, LLVM and ptxas: `sm_80`.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Sm80 => "sm_80",
            Arch::Sm90a => "sm_90a",
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
