//! Runs one test of this program in a process of its own.

use std::process::{Command, Output};

/// Set in a child. The tests that are a child's part (`child_..`) return at once where it is not set.
const CHILD: &str = "ATTN_BACKWARD_TEST_CHILD";

/// Whether this process is a child.
pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs the test `test` alone in a new process.
pub fn run(test: &str) -> Output {
    let program = std::env::current_exe().expect("the path of this program");
    let arguments = ["--exact", test, "--nocapture", "--test-threads", "1"];
    Command::new(program).args(arguments).env(CHILD, "1").output().expect("a child process")
}

/// What the child printed, for a failure's message.
pub fn printed(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    format!("{}\n{out}\n{err}", output.status)
}
