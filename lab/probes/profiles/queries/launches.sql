-- What every step asked of the GPU: graphs and single kernels launched, kernels that ran for them, the time they took.
WITH
  steps AS (
    SELECT ts, ts + dur AS until, dur, ROW_NUMBER() OVER (ORDER BY ts) AS step
    FROM slice WHERE category = 'user_annotation' AND name = 'eagle3lab step'
  ),
  calls AS (
    SELECT steps.step, slice.name, EXTRACT_ARG(slice.arg_set_id, 'args.correlation') AS correlation
    FROM slice JOIN steps ON slice.ts BETWEEN steps.ts AND steps.until
    WHERE slice.category IN ('cuda_runtime', 'cuda_driver')
  ),
  ran AS (
    SELECT calls.step, COUNT(*) AS n, SUM(kernels.dur) AS dur
    FROM calls JOIN (
      SELECT dur, EXTRACT_ARG(arg_set_id, 'args.correlation') AS correlation FROM slice WHERE category = 'kernel'
    ) AS kernels ON kernels.correlation = calls.correlation
    GROUP BY calls.step
  )
SELECT
  steps.step,
  ROUND(steps.dur / 1e3, 1) AS host_us,
  SUM(calls.name GLOB '*GraphLaunch*') AS graphs,
  SUM(calls.name GLOB '*LaunchKernel*') AS single_kernels,
  ran.n AS kernels_ran,
  ROUND(ran.dur / 1e3, 1) AS kernel_us
FROM steps LEFT JOIN calls USING (step) LEFT JOIN ran USING (step)
GROUP BY steps.step
ORDER BY steps.step;
