use dpmf::planner::*;
use dpmf::*;
fn main() -> Result<()> {
    let a: Vec<String> = std::env::args().collect();
    let (examples, batch, epochs): (u64, u64, usize) = (a[1].parse().unwrap(), a[2].parse().unwrap(), a[3].parse().unwrap());
    let n = Request::steps(examples, batch, epochs)?;
    let mut planner = Planner::default();
    for epsilon in &a[4..] {
        let t = std::time::Instant::now();
        let request = Request { ..Request::new(Workload::prefix_sum(n)?, examples, batch, epochs, epsilon.parse().unwrap(), 1e-5)? };
        let start = std::time::Instant::now();
        let plan = planner.plan(&request, &mut |line: &str| { eprintln!("{:.2} {line}", start.elapsed().as_secs_f64()); std::ops::ControlFlow::Continue(()) })?;
        println!("ε {epsilon}: {:.2} s, bound {:?}", t.elapsed().as_secs_f64(), plan.lower_bound_rmse());
        for c in plan.candidates() {
            let r = c.row();
            println!("   {:8.3} σ {:.4} {} {} buffers {:?} {:?} {}", r.rmse, r.noise_multiplier, r.selector, r.sampling, r.buffers, r.excluded, if r.estimated {"~"} else {""});
        }
    }
    Ok(())
}
