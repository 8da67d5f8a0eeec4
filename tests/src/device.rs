//! The GPU of tests that need one: opened once for a test program, or loudly skipped and counted.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Once, OnceLock};
use std::time::Duration;

use attn_backward::Target;
use attn_backward::gpu::{Gpu, GpuError, ModuleKind};

/// Set to 1 where a GPU must be there: a test that finds none then fails instead of being skipped.
pub const REQUIRE_GPU: &str = "ATTN_BACKWARD_REQUIRE_GPU";

/// Seconds that a test may take, where tools such as compute-sanitizer slow it down. A kernel that never ends cannot be stopped: the whole
/// program is.
pub const HANG_AFTER_SECONDS: &str = "ATTN_BACKWARD_HANG_AFTER_SECONDS";

const DEFAULT_HANG_AFTER_SECONDS: u64 = 110;

static SKIPPED: AtomicUsize = AtomicUsize::new(0);

/// A GPU and the modules that run on it.
#[derive(Debug)]
pub struct TestGpu {
    /// The first GPU that the driver sees.
    pub gpu: Gpu,
    /// Portable, and Hopper where it runs.
    pub modules: Vec<ModuleKind>,
}

impl TestGpu {
    /// The GPU as the plans of `module` see it.
    pub fn target(&self, module: ModuleKind) -> Target {
        Target::of(&self.gpu, module)
    }
}

/// Runs `body` with the GPU; without one, says so on stderr and returns. The test is named after the function around `body`.
///
/// # Panics
/// If there is no GPU although [`REQUIRE_GPU`] asks for one, or one that the kernels do not run on.
pub fn on_gpu<F: FnOnce(&TestGpu)>(body: F) {
    let test = name_around::<F>();
    if let Some(gpu) = device(test) {
        ending_in_time(test, || body(gpu));
    }
}

/// As [`on_gpu`], once for each module.
///
/// # Panics
/// As [`on_gpu`].
pub fn on_each_module<F: Fn(&TestGpu, ModuleKind)>(body: F) {
    let test = name_around::<F>();
    if let Some(gpu) = device(test) {
        for &module in &gpu.modules {
            eprintln!("{module} module:");
            ending_in_time(test, || body(gpu, module));
        }
    }
}

/// Says on stderr, uncaptured, that `test` does not run and why; counts it.
pub fn skip(test: &str, why: &str) {
    extern "C" fn summary() {
        say(&format!("SKIPPED: {} GPU tests did not run", SKIPPED.load(Ordering::Relaxed)));
    }
    static AT_EXIT: Once = Once::new();
    unsafe extern "C" {
        safe fn atexit(callback: extern "C" fn()) -> i32;
    }
    SKIPPED.fetch_add(1, Ordering::Relaxed);
    say(&format!("SKIPPED ({why}): {test}"));
    AT_EXIT.call_once(|| {
        atexit(summary);
    });
}

/// The GPU, or `None` and a line on stderr.
fn device(test: &str) -> Option<&'static TestGpu> {
    static DEVICE: OnceLock<Option<TestGpu>> = OnceLock::new();
    let device = DEVICE.get_or_init(open).as_ref();
    if device.is_none() {
        assert!(std::env::var(REQUIRE_GPU).as_deref() != Ok("1"), "{test}: {REQUIRE_GPU}=1, and there is no GPU");
        skip(test, "no GPU");
    }
    device
}

/// The first GPU, `None` if there is none. A GPU that does not work is a failure, not a reason to skip.
fn open() -> Option<TestGpu> {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(GpuError::NoDriver { .. } | GpuError::NoDevice { .. }) => return None,
        Err(error) => panic!("{error}"),
    };
    let mut modules = vec![ModuleKind::Portable];
    if gpu.best_module().unwrap_or_else(|error| panic!("{error}")) == ModuleKind::Hopper {
        modules.push(ModuleKind::Hopper);
    }
    for &module in &modules {
        gpu.load(module).unwrap_or_else(|error| panic!("{error}"));
    }
    Some(TestGpu { gpu, modules })
}

/// Runs `body`, and ends the program if it takes so long that a kernel must hang.
fn ending_in_time(test: &'static str, body: impl FnOnce()) {
    let (done, waiting) = channel::<()>();
    let seconds = std::env::var(HANG_AFTER_SECONDS).ok().and_then(|seconds| seconds.parse().ok());
    let seconds = seconds.unwrap_or(DEFAULT_HANG_AFTER_SECONDS);
    std::thread::spawn(move || {
        if waiting.recv_timeout(Duration::from_secs(seconds)) == Err(RecvTimeoutError::Timeout) {
            say(&format!("HANGS: {test} did not end within {seconds} s"));
            std::process::exit(101);
        }
    });
    body();
    drop(done);
}

/// Path of the function that the closure `F` is written in, without the crate.
fn name_around<F>() -> &'static str {
    let path = std::any::type_name::<F>();
    let path = path.strip_suffix("::{{closure}}").unwrap_or(path);
    path.split_once("::").map_or(path, |(_, inside)| inside)
}

/// One line on stderr; the test harness captures what `eprintln!` prints, and not this.
fn say(line: &str) {
    // A closed stderr is no reason to fail.
    let _ = writeln!(std::io::stderr(), "{line}");
}
